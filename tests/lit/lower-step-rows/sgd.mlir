// A row of the parameter is fetched ahead, read and written once; there is no state.
// RUN: gossamer-opt %s -p 'expose-storage,lower-step-rows{bits=256}' | filecheck %s

// CHECK-LABEL: func.func @sgd(
// CHECK:         scf.parallel
// CHECK:           memref.prefetch
// CHECK-NOT:       memref.prefetch
// CHECK:           arith.cmpi ult
// CHECK:           arith.subf
// CHECK:           vector.store {{.*}} : memref<?x8xf32>, vector<8xf32>
// CHECK-NOT:       vector.store
func.func @sgd(%lines: tensor<?x?xi64>, %rates: tensor<?x?xf64>) -> tensor<?xi64> {
  %wrong = "kernel.step_rows"(%lines, %rates) {kind = "sgd", element = "f32", columns = 8 : i64}
    : (tensor<?x?xi64>, tensor<?x?xf64>) -> tensor<?xi64>
  return %wrong : tensor<?xi64>
}
