// What the slices schedule does not compute.
// RUN: gossamer-opt %s -p slice-rows --split-input-file --verify-diagnostics

// There is no epilogue.
// expected-error @unknown {{the slices schedule has no epilogue}}
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 32}>
func.func @epilogue(%a: tensor<?x?xf32, #CSR>, %x: tensor<?xf32>) -> tensor<?xf32> {
  %y = "kernel.gather_rows"(%a, %x) ({
  ^bb0(%sum: f32):
    %0 = arith.addf %sum, %sum : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 8 : i64, vectors = 2 : i64, ahead = 2 : i64, gathers = 0 : i64} : (tensor<?x?xf32, #CSR>, tensor<?xf32>) -> tensor<?xf32>
  return %y : tensor<?xf32>
}
