// RUN: not gossamer-opt %s -p 'expose-storage' 2>&1 | filecheck %s

// CHECK: has a weight tensor<?x9xf32> for 6 taps
func.func @region(%x: tensor<?x?x?xf32>, %w: tensor<?x9xf32>, %height: index, %width: index) -> tensor<?x?x?xf32> {
  %y = "kernel.convolve_depthwise"(%x, %w, %height, %width) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, window = [1, 2, 3, 1, 1, 2, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 4, 0]}
    : (tensor<?x?x?xf32>, tensor<?x9xf32>, index, index) -> tensor<?x?x?xf32>
  return %y : tensor<?x?x?xf32>
}
