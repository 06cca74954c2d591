// Of images that are known to be whole tiles a pointwise kernel packs nothing: nonzeros multiply pixels as they lie.
// RUN: gossamer-opt %s -p 'expose-storage,lower-convolve,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func private @region_tile8(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x6x?xf32>,
// CHECK-NOT:     vector.maskedload
// CHECK-COUNT-2: vector.load %[[X]]
// CHECK:         vector.maskedstore
#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 6 : dense, d0 : dense, d1 mod 6 : compressed), posWidth = 32, crdWidth = 16
}>
func.func @region(%x: tensor<?x6x?xf32>, %w: tensor<8x6xf32, #KB>, %d: index, %h: index, %v: index) -> tensor<?x8x?xf32> {
  %y = "kernel.convolve"(%x, %w, %d, %h, %v) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, window = [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 4, 4, 1, 6, 2, 0]}
    : (tensor<?x6x?xf32>, tensor<8x6xf32, #KB>, index, index, index) -> tensor<?x8x?xf32>
  return %y : tensor<?x8x?xf32>
}
