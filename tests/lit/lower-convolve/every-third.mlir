// Where a stride of three lies between pixels, they are gathered.
// RUN: gossamer-opt %s -p 'expose-storage,lower-convolve,canonicalize,cse' | filecheck %s

#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 6 : dense, d0 : dense, d1 mod 6 : compressed), posWidth = 32, crdWidth = 16
}>
// CHECK-LABEL: func.func private @three_tile4
// CHECK:         vector.gather
func.func @three(%x: tensor<?x3x?xf32>, %w: tensor<8x6xf32, #KB>, %d: index, %h: index, %v: index) -> tensor<?x8x?xf32> {
  %y = "kernel.convolve"(%x, %w, %d, %h, %v) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, window = [1, 1, 2, 1, 1, 3, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 5, 12, 1, 3, 1, 0]}
    : (tensor<?x3x?xf32>, tensor<8x6xf32, #KB>, index, index, index) -> tensor<?x8x?xf32>
  return %y : tensor<?x8x?xf32>
}
