// RUN: not gossamer-opt %s -p 'expose-storage{arrays=true},lower-reduce-edges' 2>&1 | filecheck %s

// CHECK: body reads a row by (r, c, f) -> (r, f), or what belongs to a column by (r, c, f) -> (c, f)
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @maximum(%a: tensor<?x?xf32, #CSR>, %x: tensor<18xf32>) -> tensor<?x18xf32> {
  %y = "kernel.reduce_edges"(%a) ({
    %0 = "kernel.read"(%x) {map = affine_map<(r, c, f) -> (f)>} : (tensor<18xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {kind = "max"} : (tensor<?x?xf32, #CSR>) -> tensor<?x18xf32>
  return %y : tensor<?x18xf32>
}
