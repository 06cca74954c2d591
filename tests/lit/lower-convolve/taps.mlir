// A 3x3 kernel reads what is packed by the shift of each nonzero's tap; results between rows of the image are not stored.
// RUN: gossamer-opt %s -p 'expose-storage,lower-convolve,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func private @region_tile8(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x6x?xf32>,
// CHECK:         memref.view {{.*}} : memref<?xi8> to memref<96xf32>
// CHECK:         memref.view {{.*}} : memref<?xi8> to memref<36xi32>
// CHECK:         scf.for
// CHECK:           vector.expandload %[[X]]
// CHECK:           vector.store {{.*}} : memref<96xf32>, vector<4xf32>
// CHECK:           scf.for
// CHECK:             memref.load {{.*}} : memref<36xi32>
// CHECK-COUNT-2:     vector.fma
// CHECK:             vector.compressstore
#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 36 : dense, d0 : dense, d1 mod 36 : compressed), posWidth = 32, crdWidth = 16
}>
func.func @region(%x: tensor<?x6x?xf32>, %w: tensor<8x54xf32, #KB>, %d: index, %h: index, %v: index) -> tensor<?x8x?xf32> {
  %y = "kernel.convolve"(%x, %w, %d, %h, %v) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, window = [1, 3, 3, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 5, 5, 1, 4, 2, 0]}
    : (tensor<?x6x?xf32>, tensor<8x54xf32, #KB>, index, index, index) -> tensor<?x8x?xf32>
  return %y : tensor<?x8x?xf32>
}
