// Where sizes are open, a tile is a strip, two rows of one vector here: what taps read of it has four rows of two vectors. Pixels
// past the end of a row are masked, nothing is expanded or compressed. What two groups of volumes read at two depths is counted.
// RUN: gossamer-opt %s -p 'expose-storage,lower-convolve,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func private @region_tile8(
// CHECK-SAME:    %[[D:[a-z0-9]*]]: index, %[[H:[a-z0-9]*]]: index, %[[V:[a-z0-9]*]]: index, %[[X:[a-z0-9]*]]: memref<?x6x?xf32>,
// CHECK-DAG:     arith.constant dense<[0, 1, 2, 3]>
// CHECK-NOT:     vector.expandload
// CHECK:         memref.view {{.*}} : memref<?xi8> to memref<192xf32>
// CHECK:         memref.view {{.*}} : memref<?xi8> to memref<54xi32>
// CHECK:         scf.for
// CHECK-COUNT-8:   vector.maskedload %[[X]]
// CHECK:         scf.for
// CHECK-COUNT-2:   vector.fma
// CHECK-NOT:     vector.compress
// CHECK-COUNT-2: vector.maskedstore
#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 54 : dense, d0 : dense, d1 mod 54 : compressed), posWidth = 32, crdWidth = 16
}>
func.func @region(%x: tensor<?x6x?xf32>, %w: tensor<8x54xf32, #KB>, %d: index, %h: index, %v: index) -> tensor<?x8x?xf32> {
  %y = "kernel.convolve"(%x, %w, %d, %h, %v) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, window = [2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 2, 3, 2, 0]}
    : (tensor<?x6x?xf32>, tensor<8x54xf32, #KB>, index, index, index) -> tensor<?x8x?xf32>
  return %y : tensor<?x8x?xf32>
}
