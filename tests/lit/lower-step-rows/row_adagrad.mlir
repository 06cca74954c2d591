// The mean of a row's squares is added to one number of state.
// RUN: gossamer-opt %s -p 'expose-storage,lower-step-rows{bits=256}' | filecheck %s

// CHECK-LABEL: func.func @row_adagrad(
// CHECK:         vector.reduction <add>
// CHECK:         memref.store {{.*}} : memref<?xf32>
// CHECK:         vector.maskedstore {{.*}} : memref<?x7xf32>
func.func @row_adagrad(%lines: tensor<?x?xi64>, %rates: tensor<?x?xf64>) -> tensor<?xi64> {
  %wrong = "kernel.step_rows"(%lines, %rates) {kind = "row_adagrad", element = "f32", columns = 7 : i64}
    : (tensor<?x?xi64>, tensor<?x?xf64>) -> tensor<?xi64>
  return %wrong : tensor<?xi64>
}
