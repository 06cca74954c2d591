// A larger first-level cache has room for wider panels of x, and shorter vectors leave some.
// RUN: gossamer-opt %s -p 'choose-format{schedule=rowpairs l1d=49152}' | filecheck %s
// RUN: gossamer-opt %s -p 'choose-format{schedule=rowpairs bits=256}' | filecheck %s --check-prefix=SHORT

// CHECK: "rowpairs(reduction=1, width=128)"
// SHORT: "rowpairs(reduction=1, width=384)"
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @region(%x: tensor<?x768xf32>, %w: tensor<1024x768xf32, #CSR> {kernel.density = 0.5 : f64}) -> tensor<?x1024xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x768xf32>, tensor<1024x768xf32, #CSR>) -> tensor<?x1024xf32>
  return %y : tensor<?x1024xf32>
}
