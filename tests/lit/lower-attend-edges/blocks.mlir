// A row at a time, in blocks of 1024 scores: their maximum, their exponentials, and the rows of values that they weight.
// RUN: gossamer-opt %s -p 'expose-storage{arrays=true},lower-attend-edges' | filecheck %s

// CHECK-LABEL: func.func private @attend_heads(
// CHECK:         %[[SCRATCH:.*]] = memref.view %{{.*}} : memref<?xi8> to memref<1040xf32>
// CHECK:         scf.for %[[ROW:[a-z0-9]*]] =
// CHECK:           %[[TARGET:.*]] = vector.load %{{.*}}[%[[ROW]], %{{.*}}] : memref<?x2xf32>, vector<2xf32>
// CHECK:           scf.for %[[FIRST:[a-z0-9]*]] = {{.*}} -> (vector<2xf32>, vector<2xf32>)
// CHECK:             %[[LARGEST:.*]] = scf.for
// CHECK:               %[[SOURCE:.*]] = vector.load %{{.*}} : memref<?x2xf32>, vector<2xf32>
// CHECK:               %[[RAW:.*]] = arith.addf %[[TARGET]], %[[SOURCE]] : vector<2xf32>
// CHECK:               arith.cmpf ogt, %[[RAW]]
// CHECK:               vector.store %{{.*}}, %[[SCRATCH]]
// CHECK:             scf.for {{.*}} -> (vector<16xf32>)
// CHECK:               %[[POWER:.*]] = llvm.call_intrinsic "llvm.x86.avx512.mask.scalef.ps.512"
// CHECK-NEXT:          vector.store %[[POWER]], %[[SCRATCH]]
// CHECK:             scf.if {{.*}} -> (vector<16xf32>, vector<16xf32>)
// CHECK:             scf.for {{.*}} -> (vector<16xf32>, vector<16xf32>)
// CHECK:               vector.maskedload %{{.*}} : memref<?x18xf32>
// CHECK-COUNT-2:       vector.fma
// CHECK-LABEL: func.func @attend(
// CHECK:         scf.parallel
// CHECK-COUNT-2:   scf.while
// CHECK:           func.call @attend_heads
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 32}>
func.func @attend(%a: tensor<?x?xf32, #CSR>, %v: tensor<?x18xf32>, %t: tensor<?x2xf32>, %u: tensor<?x2xf32>)
    -> (tensor<?x18xf32>, tensor<?x4xf32>) {
  %y, %s = "kernel.attend_edges"(%a, %v, %t, %u) {
    heads = 2 : i64, weighted = 0 : i64, scale = 1.0 : f64, slope = 0.2 : f64, dropout = 0.0 : f64,
    operandSegmentSizes = array<i32: 1, 1, 1, 1, 0, 0, 0, 0, 0>
  } : (tensor<?x?xf32, #CSR>, tensor<?x18xf32>, tensor<?x2xf32>, tensor<?x2xf32>) -> (tensor<?x18xf32>, tensor<?x4xf32>)
  return %y, %s : tensor<?x18xf32>, tensor<?x4xf32>
}
