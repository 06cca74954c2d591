// A score function: the soft cap tanh(s / 20) * 20, then the floats of a tile are added. Hidden keys are left out after it.
// RUN: gossamer-opt %s -p 'expose-storage,lower-attend-blocks{bits=512}' | filecheck %s

// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %{{.*}}: memref<?xi16>, %[[FLOATS:[a-z0-9]*]]: memref<?xf32>
// CHECK:         scf.parallel
// CHECK:             scf.if
// CHECK:               arith.constant dense<5.000000e-02>
// CHECK:               math.tanh
// CHECK:               arith.mulf
// CHECK:               vector.load %[[FLOATS]]
// CHECK:               arith.addf
// CHECK:               arith.select
func.func @region(%q: tensor<?xf32>, %k: tensor<?xf32>, %v: tensor<?xf32>, %p: tensor<?xi32>, %t: tensor<?xi32>, %w: tensor<?xi16>, %f: tensor<?xf32>, %s0: index, %s1: index, %s2: index, %s3: index, %s4: index, %s5: index, %s6: index, %s7: index, %s8: index, %s9: index, %s10: index, %s11: index, %s12: index, %s13: index, %s14: index, %s15: index, %s16: index, %s17: index, %s18: index, %s19: index) -> (tensor<?xf32>, tensor<?xf32>) {
  %y, %l = "kernel.attend_blocks"(%q, %k, %v, %p, %t, %w, %f, %s0, %s1, %s2, %s3, %s4, %s5, %s6, %s7, %s8, %s9, %s10, %s11, %s12, %s13, %s14, %s15, %s16, %s17, %s18, %s19) {
    operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0, 0, 20>, head_size = 20 : i64, score = [0.125, 0.05, "tanh", 20.0, "add"], dropout = 0.0 : f64
  } : (tensor<?xf32>, tensor<?xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xi32>, tensor<?xi16>, tensor<?xf32>, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index) -> (tensor<?xf32>, tensor<?xf32>)
  return %y, %l : tensor<?xf32>, tensor<?xf32>
}
