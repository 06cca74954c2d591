// Past keys, then new ones are put into one memory, block by block, from which the products read them. A head ends inside of a vector.
// RUN: gossamer-opt %s -p 'expose-storage,lower-attend-cached{bits=512}' | filecheck %s

// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %{{.*}}: memref<?xf32>, %[[K:[a-z0-9]*]]: memref<?xf32>, %{{.*}}: memref<?xf32>, %[[NEW:[a-z0-9]*]]: memref<?xf32>, %{{.*}}: memref<?xf32>, %{{[a-z0-9]*}}: index
// CHECK-SAME:    index, %{{[a-z0-9]*}}: memref<?xf32>, %[[ALL:[a-z0-9]*]]: memref<?xf32>, %{{[a-z0-9]*}}: memref<?xf32>, %{{[a-z0-9]*}}: memref<?xi8>
// CHECK:         scf.parallel
// CHECK:           vector.load %[[K]]
// CHECK:           vector.store %{{.*}}, %[[ALL]]
// CHECK:           vector.maskedload %[[K]]
// CHECK:           vector.maskedstore %[[ALL]]
// CHECK:           vector.load %[[NEW]]
// CHECK:           vector.store %{{.*}}, %[[ALL]]
// CHECK:           vector.load %[[ALL]]
// CHECK:           vector.fma
func.func @region(%q: tensor<?xf32>, %k: tensor<?xf32>, %v: tensor<?xf32>, %nk: tensor<?xf32>, %nv: tensor<?xf32>, %s0: index, %s1: index, %s2: index, %s3: index, %s4: index, %s5: index, %s6: index, %s7: index, %s8: index, %s9: index, %s10: index, %s11: index, %s12: index, %s13: index, %s14: index, %s15: index, %s16: index, %s17: index, %s18: index, %s19: index, %s20: index, %s21: index, %s22: index, %s23: index, %s24: index) -> (tensor<?xf32>, tensor<?xf32>, tensor<?xf32>) {
  %y, %ak, %av = "kernel.attend_appended"(%q, %k, %v, %s0, %s1, %s2, %s3, %s4, %s5, %s6, %s7, %s8, %s9, %s10, %s11, %s12, %s13, %s14, %s15, %s16, %s17, %s18, %s19, %s20, %s21, %s22, %s23, %s24, %nk, %nv) {
    operandSegmentSizes = array<i32: 1, 1, 1, 0, 25, 1, 1>, head_size = 20 : i64, group = 1 : i64, queries = 1 : i64, score = [0.125]
  } : (tensor<?xf32>, tensor<?xf32>, tensor<?xf32>, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, tensor<?xf32>, tensor<?xf32>) -> (tensor<?xf32>, tensor<?xf32>, tensor<?xf32>)
  return %y, %ak, %av : tensor<?xf32>, tensor<?xf32>, tensor<?xf32>
}
