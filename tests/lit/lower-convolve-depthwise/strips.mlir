// Strips of columns, by rows above, within and below those for which all taps are inside; by a stride of two every other lane.
// RUN: gossamer-opt %s -p 'expose-storage,lower-convolve-depthwise,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x?x?xf32>, %[[W:[a-z0-9]*]]: memref<?x6xf32>, %[[B:[a-z0-9]*]]: memref<?xf32>, %{{.*}}: index, %{{.*}}: index, %[[OUT:[a-z0-9]*]]: memref<?x?x?xf32>
// CHECK:         scf.parallel
// CHECK-COUNT-6:   memref.load %[[W]]
// CHECK:           memref.load %[[B]]
// CHECK:           scf.for
// CHECK:             scf.for
// CHECK:               scf.if
// CHECK-COUNT-2:         vector.maskedload %[[X]]
// CHECK:                 vector.shuffle {{.*}} [0, 2, 4, 6]
// CHECK:               vector.maskedstore %[[OUT]]
// CHECK:             scf.for
// CHECK-NOT:           scf.if
// CHECK-COUNT-6:       vector.fma
// CHECK:               arith.addf
// CHECK:               vector.maskedstore %[[OUT]]
// CHECK:             scf.for
func.func @region(%x: tensor<?x?x?xf32>, %w: tensor<?x6xf32>, %b: tensor<?xf32>, %height: index, %width: index) -> tensor<?x?x?xf32> {
  %y = "kernel.convolve_depthwise"(%x, %w, %height, %width) ({
  ^bb0(%sum: f32):
    %0 = "kernel.read"(%b) {map = affine_map<(n, m, q) -> (m)>} : (tensor<?xf32>) -> f32
    %1 = arith.addf %sum, %0 : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {lanes = 4 : i64, window = [1, 2, 3, 1, 1, 2, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 4, 0]}
    : (tensor<?x?x?xf32>, tensor<?x6xf32>, index, index) -> tensor<?x?x?xf32>
  return %y : tensor<?x?x?xf32>
}
