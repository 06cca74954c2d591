// A loop over tiles of 32 queries; each turns its queries, then takes tiles of keys as the table lists them: masked where hidden in part.
// RUN: gossamer-opt %s -p 'expose-storage,lower-attend-blocks{bits=512}' | filecheck %s

// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %[[Q:[a-z0-9]*]]: memref<?xf32>, %[[K:[a-z0-9]*]]: memref<?xf32>, %[[V:[a-z0-9]*]]: memref<?xf32>, %{{.*}}: memref<?xi32>, %[[TILES:[a-z0-9]*]]: memref<?xi32>, %[[WORDS:[a-z0-9]*]]: memref<?xi16>
// CHECK:         scf.parallel
// CHECK:           vector.maskedload %[[Q]]
// CHECK:           scf.for
// CHECK:             memref.load %[[TILES]]
// CHECK:             scf.if
// CHECK:               vector.load %[[WORDS]]
// CHECK:               memref.load %[[K]]
// CHECK:               vector.fma
// CHECK:               arith.select
// CHECK:             } else {
// CHECK-NOT:           vector.load %[[WORDS]]
// CHECK:               memref.load %[[K]]
// CHECK:             vector.fma
// CHECK:             memref.load %[[V]]
// CHECK:           vector.maskedstore
func.func @region(%q: tensor<?xf32>, %k: tensor<?xf32>, %v: tensor<?xf32>, %p: tensor<?xi32>, %t: tensor<?xi32>, %w: tensor<?xi16>, %f: tensor<?xf32>, %s0: index, %s1: index, %s2: index, %s3: index, %s4: index, %s5: index, %s6: index, %s7: index, %s8: index, %s9: index, %s10: index, %s11: index, %s12: index, %s13: index, %s14: index, %s15: index, %s16: index, %s17: index, %s18: index, %s19: index) -> (tensor<?xf32>, tensor<?xf32>) {
  %y, %l = "kernel.attend_blocks"(%q, %k, %v, %p, %t, %w, %f, %s0, %s1, %s2, %s3, %s4, %s5, %s6, %s7, %s8, %s9, %s10, %s11, %s12, %s13, %s14, %s15, %s16, %s17, %s18, %s19) {
    operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0, 0, 20>, head_size = 20 : i64, score = [0.125], dropout = 0.0 : f64
  } : (tensor<?xf32>, tensor<?xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xi32>, tensor<?xi16>, tensor<?xf32>, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index) -> (tensor<?xf32>, tensor<?xf32>)
  return %y, %l : tensor<?xf32>, tensor<?xf32>
}
