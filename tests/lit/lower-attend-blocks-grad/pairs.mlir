// Products of pairs of bf16 by dot products, sums of weighted rows of f32.
// RUN: gossamer-opt %s -p 'expose-storage,lower-attend-blocks-grad{bits=512}' | filecheck %s

// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %{{[a-z0-9]*}}: memref<?xf32>, %[[K:[a-z0-9]*]]: memref<?xf32>
// CHECK-SAME:    %[[Q2:[a-z0-9]*]]: memref<?xbf16>, %[[K2:[a-z0-9]*]]: memref<?xbf16>, %[[V2:[a-z0-9]*]]: memref<?xbf16>, %[[G2:[a-z0-9]*]]: memref<?xbf16>
// CHECK:         scf.parallel
// CHECK:           vector.maskedload %[[Q2]]
// CHECK:           vector.maskedload %[[G2]]
// CHECK:             vector.load %[[K2]]
// CHECK:             x86.avx512.dot
// CHECK:             vector.load %[[V2]]
// CHECK:             x86.avx512.dot
// CHECK:             memref.load %[[K]]
// CHECK:             vector.fma
func.func @region(%q: tensor<?xf32>, %k: tensor<?xf32>, %v: tensor<?xf32>, %g: tensor<?xf32>, %s: tensor<?xf32>, %d: tensor<?xf32>, %p: tensor<?xi32>, %t: tensor<?xi32>, %w: tensor<?xi16>, %f: tensor<?xf32>, %a: tensor<?xbf16>, %b: tensor<?xbf16>, %c: tensor<?xbf16>, %e: tensor<?xbf16>, %s0: index, %s1: index, %s2: index, %s3: index, %s4: index, %s5: index, %s6: index, %s7: index, %s8: index, %s9: index, %s10: index, %s11: index, %s12: index, %s13: index, %s14: index, %s15: index, %s16: index, %s17: index, %s18: index, %s19: index, %s20: index, %s21: index, %s22: index) -> (tensor<?xf32>) {
  %dq = "kernel.attend_blocks_of_queries"(%q, %k, %v, %p, %t, %w, %f, %a, %b, %c, %e, %s0, %s1, %s2, %s3, %s4, %s5, %s6, %s7, %s8, %s9, %s10, %s11, %s12, %s13, %s14, %s15, %s16, %s17, %s18, %s19, %s20, %s21, %s22, %g, %s, %d) {
    operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0, 4, 23, 1, 1, 1>, head_size = 20 : i64, score = [0.125], dropout = 0.0 : f64
  } : (tensor<?xf32>, tensor<?xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xi32>, tensor<?xi16>, tensor<?xf32>, tensor<?xbf16>, tensor<?xbf16>, tensor<?xbf16>, tensor<?xbf16>, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, tensor<?xf32>, tensor<?xf32>, tensor<?xf32>) -> (tensor<?xf32>)
  return %dq : tensor<?xf32>
}
