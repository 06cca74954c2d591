// Samples at CSR that sum along the last dimension of what they read are scheduled; all else is refused.
// RUN: gossamer-opt %s -p 'sample-rows{bits=256}' --split-input-file --verify-diagnostics | filecheck %s

// CHECK-LABEL: func.func @sddmm(
// CHECK:         "kernel.sample"
// CHECK:         {lanes = 8 : i64, reduced = 1 : i64, together = 4 : i64}
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @sddmm(%s: tensor<?x?xf32, #CSR>, %x: tensor<?x?xf32>, %y: tensor<?x?xf32>) -> tensor<?xf32> {
  %v = "kernel.sample"(%s) ({
    %0 = "kernel.read"(%x) {map = affine_map<(i, j, k) -> (i, k)>} : (tensor<?x?xf32>) -> f32
    %1 = "kernel.read"(%y) {map = affine_map<(i, j, k) -> (j, k)>} : (tensor<?x?xf32>) -> f32
    %2 = arith.mulf %0, %1 : f32
    "kernel.yield"(%2) : (f32) -> ()
  }) {reduced = 1 : i64} : (tensor<?x?xf32, #CSR>) -> tensor<?xf32>
  return %v : tensor<?xf32>
}

// -----

// Vectors along k would have a stride.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @across(%s: tensor<?x?xf32, #CSR>, %y: tensor<?x?xf32>) -> tensor<?xf32> {
  // expected-error @unknown {{the dots schedule reads along the last dimension}}
  %v = "kernel.sample"(%s) ({
    %0 = "kernel.read"(%y) {map = affine_map<(i, j, k) -> (k, j)>} : (tensor<?x?xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {reduced = 1 : i64} : (tensor<?x?xf32, #CSR>) -> tensor<?xf32>
  return %v : tensor<?xf32>
}
