// Four rows of a 3 x 3 kernel read six rows of the image, each of them once.
// RUN: gossamer-opt %s -p 'expose-storage,lower-convolve-depthwise,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x?x?xf32>,
// CHECK:         scf.if
// CHECK:         vector.maskedstore
// CHECK-NOT:     scf.if
// CHECK:         scf.for
// CHECK-COUNT-18: vector.maskedload %[[X]]
// CHECK-NOT:     vector.maskedload
// CHECK-COUNT-4: vector.maskedstore
func.func @region(%x: tensor<?x?x?xf32>, %w: tensor<?x9xf32>, %height: index, %width: index) -> tensor<?x?x?xf32> {
  %y = "kernel.convolve_depthwise"(%x, %w, %height, %width) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, window = [1, 3, 3, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1, 4, 0]}
    : (tensor<?x?x?xf32>, tensor<?x9xf32>, index, index) -> tensor<?x?x?xf32>
  return %y : tensor<?x?x?xf32>
}
