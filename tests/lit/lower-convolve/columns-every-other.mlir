// Behind a stride of two each column of taps reads every other pixel from its own one on: two vectors, and what is taken of them.
// RUN: gossamer-opt %s -p 'expose-storage,lower-convolve,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func private @region_tile8(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x6x?xf32>,
// CHECK-NOT:     vector.gather
// CHECK:         vector.maskedload %[[X]]
// CHECK:         vector.maskedload %[[X]]
// CHECK:         vector.shuffle {{.*}} [0, 2, 4, 6]
// CHECK-NOT:     vector.gather
// CHECK:         scf.for
// CHECK-COUNT-2:   vector.fma
#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 18 : dense, d0 : dense, d1 mod 18 : compressed), posWidth = 32, crdWidth = 16
}>
func.func @region(%x: tensor<?x6x?xf32>, %w: tensor<8x18xf32, #KB>, %d: index, %h: index, %v: index) -> tensor<?x8x?xf32> {
  %y = "kernel.convolve"(%x, %w, %d, %h, %v) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, window = [1, 1, 3, 1, 1, 2, 1, 1, 1, 0, 0, 1, 0, 0, 1, 1, 5, 9, 1, 6, 2, 1]}
    : (tensor<?x6x?xf32>, tensor<8x18xf32, #KB>, index, index, index) -> tensor<?x8x?xf32>
  return %y : tensor<?x8x?xf32>
}
