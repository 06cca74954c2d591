// Something must be read along the dimension that is summed over: only that says how long it is.
// RUN: gossamer-opt %s -p 'expose-storage{arrays=true},lower-dots' --verify-diagnostics

// expected-error @unknown {{nothing is read along the reduced dimension}}
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 32}>
func.func @rows(%s: tensor<?x?xf32, #CSR>, %x: tensor<?xf32>) -> tensor<?xf32> {
  %v = "kernel.sample"(%s) ({
    %0 = "kernel.read"(%x) {map = affine_map<(i, j, k) -> (i)>} : (tensor<?xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 8 : i64, reduced = 1 : i64, together = 4 : i64} : (tensor<?x?xf32, #CSR>) -> tensor<?xf32>
  return %v : tensor<?xf32>
}
