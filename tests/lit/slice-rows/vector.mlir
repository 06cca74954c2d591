// A product with a vector takes the matrix in slices of rows; one with a matrix is refused, and so are narrow floats.
// RUN: gossamer-opt %s -p 'slice-rows{width=16}' --split-input-file --verify-diagnostics | filecheck %s

// CHECK-LABEL: func.func @spmv(
// CHECK-SAME:    tensor<?x?xf32, "slices(reduction=1, lanes=8, width=16)">
// CHECK:         "kernel.gather_slices"
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 32}>
func.func @spmv(%a: tensor<?x?xf32, #CSR>, %x: tensor<?xf32>) -> tensor<?xf32> {
  %y = "kernel.gather_rows"(%a, %x) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, vectors = 2 : i64, ahead = 2 : i64, gathers = 0 : i64} : (tensor<?x?xf32, #CSR>, tensor<?xf32>) -> tensor<?xf32>
  return %y : tensor<?xf32>
}
