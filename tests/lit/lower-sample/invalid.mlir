// What kernel.sample refuses.
// RUN: gossamer-opt %s -p lower-sample --split-input-file --verify-diagnostics

func.func @dense(%s: tensor<?x?xf32>, %x: tensor<?xf32>) -> tensor<?xf32> {
  // expected-error @+1 {{'kernel.sample' needs a pattern with a sparse encoding}}
  %v = "kernel.sample"(%s) ({
    %0 = "kernel.read"(%x) {map = affine_map<(i, j) -> (j)>} : (tensor<?xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {reduced = 0 : i64} : (tensor<?x?xf32>) -> tensor<?xf32>
  return %v : tensor<?xf32>
}

// -----

#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @map(%s: tensor<?x?xf32, #CSR>, %x: tensor<?xf32>) -> tensor<?xf32> {
  // expected-error @+1 {{'kernel.sample' reads with a map that is not over 3 dimensions, the pattern's and the reduced ones}}
  %v = "kernel.sample"(%s) ({
    %0 = "kernel.read"(%x) {map = affine_map<(i, j) -> (j)>} : (tensor<?xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {reduced = 1 : i64} : (tensor<?x?xf32, #CSR>) -> tensor<?xf32>
  return %v : tensor<?xf32>
}
