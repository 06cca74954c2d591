// A row of the parameter and of its state is fetched ahead, read and written once.
// RUN: gossamer-opt %s -p 'expose-storage,lower-step-rows{bits=256}' | filecheck %s

// CHECK-LABEL: func.func @adagrad(
// CHECK:         scf.parallel
// CHECK:           memref.prefetch
// CHECK:           memref.prefetch
// CHECK:           arith.cmpi ult
// CHECK:           vector.fma
// CHECK:           math.sqrt
// CHECK:           arith.divf
// CHECK:           vector.store {{.*}} : memref<?x8xf32>, vector<8xf32>
// CHECK:           vector.store {{.*}} : memref<?x8xf32>, vector<8xf32>
func.func @adagrad(%lines: tensor<?x?xi64>, %rates: tensor<?x?xf64>) -> tensor<?xi64> {
  %wrong = "kernel.step_rows"(%lines, %rates) {kind = "adagrad", element = "f32", columns = 8 : i64}
    : (tensor<?x?xi64>, tensor<?x?xf64>) -> tensor<?xi64>
  return %wrong : tensor<?xi64>
}
