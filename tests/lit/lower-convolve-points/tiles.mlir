// A loop over tiles of outputs: the bias, then the pairs of each offset, six at a time, each weight loaded once for all of them.
// RUN: gossamer-opt %s -p 'expose-storage,lower-convolve-points{bits=512}' | filecheck %s

// CHECK-LABEL: func.func private @region_columns4(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x?xf32>, %[[W:[a-z0-9]*]]: memref<?x?x?xf32>, %[[IN:[a-z0-9]*]]: memref<?xi32>, %[[OUT:[a-z0-9]*]]: memref<?xi32>, %[[Y:[a-z0-9]*]]: memref<?x?xf32>, %[[K:[a-z0-9]*]]: index, %[[BEGIN:[a-z0-9]*]]: index, %[[END:[a-z0-9]*]]: index
// CHECK:         scf.for %{{.*}} = %{{.*}} to
// CHECK:           scf.for %{{.*}} = %[[BEGIN]] to %[[END]]
// CHECK-COUNT-6:     memref.load %[[IN]]
// CHECK-COUNT-6:     memref.load %[[OUT]]
// CHECK:             memref.prefetch %[[X]]
// CHECK-COUNT-24:    vector.maskedload %[[Y]]
// CHECK:             scf.for
// CHECK-COUNT-4:       vector.maskedload %[[W]][%[[K]],
// CHECK:               memref.load %[[X]]
// CHECK-COUNT-24:      math.fma
// CHECK-COUNT-24:    vector.maskedstore %[[Y]]
// CHECK-LABEL: func.func private @region_columns1(
// CHECK-LABEL: func.func @region(
// CHECK:         scf.parallel
// CHECK:           vector.maskedstore
// CHECK:           func.call @region_columns4
func.func @region(%x: tensor<?x?xf32>, %w: tensor<?x?x?xf32>, %b: tensor<?xf32>, %i: tensor<?xi32>, %o: tensor<?xi32>, %r: tensor<?xi32>, %p: tensor<?x?xi32>) -> tensor<?x?xf32> {
  %y = "kernel.convolve_points"(%x, %w, %b, %i, %o, %r, %p) : (tensor<?x?xf32>, tensor<?x?x?xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xi32>, tensor<?xi32>, tensor<?x?xi32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}
