// What the importer has noted about the weight's pattern reaches the family; then the hints are dropped.
// RUN: gossamer-opt %s -p 'choose-format{schedule=block}' | filecheck %s

// Blocks of the weight, as rows and columns of the product, go to the family of blocks.
// CHECK-LABEL: func.func @blocks(%arg0: tensor<?x256xf32>, %arg1: tensor<512x256xf32, "blocks({{.*}})">) -> tensor<?x512xf32> {
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @blocks(%x: tensor<?x256xf32>, %w: tensor<512x256xf32, #CSR> {kernel.density = 0.1 : f64, kernel.block = [4, 4], kernel.fill = 0.9 : f64, kernel.skew = 1.5 : f64}) -> tensor<?x512xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x256xf32>, tensor<512x256xf32, #CSR>) -> tensor<?x512xf32>
  return %y : tensor<?x512xf32>
}
