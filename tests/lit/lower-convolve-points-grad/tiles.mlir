// Each thread has rows of every w[k]; the sums of a few of them stay in registers over some pairs of a tile and an offset.
// RUN: gossamer-opt %s -p 'expose-storage,lower-convolve-points-grad{bits=256}' | filecheck %s

// CHECK-LABEL: func.func private @region_columns2(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x?xf64>, %[[G:[a-z0-9]*]]: memref<?x?xf64>, %[[IN:[a-z0-9]*]]: memref<?xi32>, %[[OUT:[a-z0-9]*]]: memref<?xi32>, %[[W:[a-z0-9]*]]: memref<?x?x?xf64>
// CHECK:         scf.for
// CHECK:           scf.for
// CHECK:             scf.for
// CHECK:               memref.load %[[OUT]]
// CHECK-COUNT-2:       vector.maskedload %[[G]]
// CHECK-COUNT-10:      math.fma
// CHECK:             vector.maskedload %[[W]]
// CHECK:             vector.maskedstore %[[W]]
// CHECK-LABEL: func.func @region(
// CHECK:         scf.parallel
// CHECK:           func.call @region_columns2
func.func @region(%x: tensor<?x?xf64>, %g: tensor<?x?xf64>, %i: tensor<?xi32>, %o: tensor<?xi32>, %p: tensor<?x?xi32>) -> tensor<?x?x?xf64> {
  %w = "kernel.convolve_points_grad"(%x, %g, %i, %o, %p) : (tensor<?x?xf64>, tensor<?x?xf64>, tensor<?xi32>, tensor<?xi32>, tensor<?x?xi32>) -> tensor<?x?x?xf64>
  return %w : tensor<?x?x?xf64>
}
