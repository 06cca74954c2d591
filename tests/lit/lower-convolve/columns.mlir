// Where columns of taps have phases of their own, a tile is two rows of two vectors, and what taps read of it has four rows of two
// vectors for each of three columns: a tap begins with one of those. One of them is past the edge in each row. Nothing is expanded.
// RUN: gossamer-opt %s -p 'expose-storage,lower-convolve,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func private @region_tile16(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x6x?xf32>,
// CHECK-NOT:     vector.expandload
// CHECK:         memref.view {{.*}} : memref<?xi8> to memref<384xf32>
// CHECK:         memref.view {{.*}} : memref<?xi8> to memref<36xi32>
// CHECK:         scf.for
// CHECK-COUNT-20:  vector.maskedload %[[X]]
// CHECK:         scf.for
// CHECK-COUNT-4:   vector.fma
// CHECK-NOT:     vector.compress
// CHECK-COUNT-4: vector.maskedstore
#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 36 : dense, d0 : dense, d1 mod 36 : compressed), posWidth = 32, crdWidth = 16
}>
func.func @region(%x: tensor<?x6x?xf32>, %w: tensor<8x54xf32, #KB>, %d: index, %h: index, %v: index) -> tensor<?x8x?xf32> {
  %y = "kernel.convolve"(%x, %w, %d, %h, %v) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, window = [1, 3, 3, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 5, 5, 1, 4, 4, 2]}
    : (tensor<?x6x?xf32>, tensor<8x54xf32, #KB>, index, index, index) -> tensor<?x8x?xf32>
  return %y : tensor<?x8x?xf32>
}
