// Two heads share the keys of one. A vector of keys that the mask hides is not read; the soft cap comes before the mask.
// RUN: gossamer-opt %s -p 'expose-storage,lower-attend-cached{bits=512}' | filecheck %s

// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %[[Q:[a-z0-9]*]]: memref<?xbf16>, %[[K:[a-z0-9]*]]: memref<?xbf16>, %[[V:[a-z0-9]*]]: memref<?xbf16>, %[[MASK:[a-z0-9]*]]: memref<?xf32>
// CHECK:         scf.parallel
// CHECK:           vector.load %[[Q]]
// CHECK:           scf.for
// CHECK:             vector.maskedload %[[MASK]]
// CHECK:             scf.if
// CHECK:               vector.load %[[K]]
// CHECK:               vector.fma
// CHECK:               math.tanh
// CHECK:             } else {
// CHECK-NOT:           vector.load %[[K]]
// CHECK:             scf.if
// CHECK:               vector.fma
// CHECK:               vector.load %[[V]]
func.func @region(%q: tensor<?xbf16>, %k: tensor<?xbf16>, %v: tensor<?xbf16>, %m: tensor<?xf32>, %s0: index, %s1: index, %s2: index, %s3: index, %s4: index, %s5: index, %s6: index, %s7: index, %s8: index, %s9: index, %s10: index, %s11: index, %s12: index, %s13: index, %s14: index, %s15: index, %s16: index, %s17: index, %s18: index) -> tensor<?xbf16> {
  %y = "kernel.attend_cached"(%q, %k, %v, %m, %s0, %s1, %s2, %s3, %s4, %s5, %s6, %s7, %s8, %s9, %s10, %s11, %s12, %s13, %s14, %s15, %s16, %s17, %s18) {
    operandSegmentSizes = array<i32: 1, 1, 1, 1, 19>, head_size = 64 : i64, group = 2 : i64, queries = 1 : i64, score = [0.125, 0.05, "tanh", 20.0]
  } : (tensor<?xbf16>, tensor<?xbf16>, tensor<?xbf16>, tensor<?xf32>, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index) -> tensor<?xbf16>
  return %y : tensor<?xbf16>
}
