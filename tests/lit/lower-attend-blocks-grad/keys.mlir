// Gradients of keys and values: keys in the lanes, the queries of all heads that share them as scalars; both sums at once.
// RUN: gossamer-opt %s -p 'expose-storage,lower-attend-blocks-grad{bits=512}' | filecheck %s

// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %[[Q:[a-z0-9]*]]: memref<?xf32>, %[[K:[a-z0-9]*]]: memref<?xf32>, %[[V:[a-z0-9]*]]: memref<?xf32>, %[[G:[a-z0-9]*]]: memref<?xf32>, %[[S:[a-z0-9]*]]: memref<?xf32>, %[[D:[a-z0-9]*]]: memref<?xf32>
// CHECK:         scf.parallel
// CHECK:           vector.maskedload %[[K]]
// CHECK:           vector.maskedload %[[V]]
// CHECK:           scf.for
// CHECK:             scf.if
// CHECK:               memref.load %[[Q]]
// CHECK:               memref.load %[[G]]
// CHECK:               memref.load %[[S]]
// CHECK:               memref.load %[[D]]
// CHECK:             } else {
// CHECK:             memref.load %[[G]]
// CHECK:             memref.load %[[Q]]
// CHECK:           vector.maskedstore
// CHECK:           vector.maskedstore
func.func @region(%q: tensor<?xf32>, %k: tensor<?xf32>, %v: tensor<?xf32>, %g: tensor<?xf32>, %s: tensor<?xf32>, %d: tensor<?xf32>, %p: tensor<?xi32>, %t: tensor<?xi32>, %w: tensor<?xi16>, %f: tensor<?xf32>, %s0: index, %s1: index, %s2: index, %s3: index, %s4: index, %s5: index, %s6: index, %s7: index, %s8: index, %s9: index, %s10: index, %s11: index, %s12: index, %s13: index, %s14: index, %s15: index, %s16: index, %s17: index, %s18: index, %s19: index, %s20: index, %s21: index, %s22: index, %s23: index, %s24: index, %s25: index) -> (tensor<?xf32>, tensor<?xf32>) {
  %dk, %dv = "kernel.attend_blocks_of_keys"(%q, %k, %v, %p, %t, %w, %f, %s0, %s1, %s2, %s3, %s4, %s5, %s6, %s7, %s8, %s9, %s10, %s11, %s12, %s13, %s14, %s15, %s16, %s17, %s18, %s19, %s20, %s21, %s22, %s23, %s24, %s25, %g, %s, %d) {
    operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0, 0, 26, 1, 1, 1>, head_size = 20 : i64, score = [0.125], dropout = 0.0 : f64
  } : (tensor<?xf32>, tensor<?xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xi32>, tensor<?xi16>, tensor<?xf32>, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, tensor<?xf32>, tensor<?xf32>, tensor<?xf32>) -> (tensor<?xf32>, tensor<?xf32>)
  return %dk, %dv : tensor<?xf32>, tensor<?xf32>
}
