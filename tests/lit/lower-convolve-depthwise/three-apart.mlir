// RUN: not gossamer-opt %s -p 'expose-storage,lower-convolve-depthwise' 2>&1 | filecheck %s

// CHECK: no depthwise convolution by columns 3 apart
func.func @region(%x: tensor<?x?x?xf32>, %w: tensor<?x9xf32>, %height: index, %width: index) -> tensor<?x?x?xf32> {
  %y = "kernel.convolve_depthwise"(%x, %w, %height, %width) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, window = [1, 3, 3, 1, 3, 3, 1, 1, 1, 0, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1, 4, 0]}
    : (tensor<?x?x?xf32>, tensor<?x9xf32>, index, index) -> tensor<?x?x?xf32>
  return %y : tensor<?x?x?xf32>
}
