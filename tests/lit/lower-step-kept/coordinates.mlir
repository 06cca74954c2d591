// The entries of a row are copied, stepped by vectors, the last one masked, and copied back while rows to come are fetched.
// RUN: gossamer-opt %s -p 'expose-storage,lower-step-kept{bits=256}' | filecheck %s

// CHECK-LABEL: func.func @step(
// CHECK-SAME:    %[[P:[a-z0-9]*]]: memref<?xi64>, %[[C:[a-z0-9]*]]: memref<?xi32>, %[[G:[a-z0-9]*]]: memref<?xf32>, %[[RATES:[a-z0-9]*]]: memref<?xf64>, %[[D:[a-z0-9]*]]: memref<?x?xf32>, %[[M:[a-z0-9]*]]: memref<?xf32>, %[[S:[a-z0-9]*]]: memref<?xf32>, %[[W:[a-z0-9]*]]: memref<?x?xf32>
// CHECK:         scf.parallel
// CHECK-COUNT-9:   memref.load %[[RATES]]
// CHECK:           scf.for
// CHECK:             memref.prefetch %[[D]]{{.*}}, write
// CHECK:             scf.for
// CHECK:               memref.load %[[C]]
// CHECK:               memref.load %[[D]]
// CHECK:               memref.store %{{.*}}, %[[W]]
// CHECK:             scf.for
// CHECK:               vector.load %[[G]]
// CHECK:               vector.load %[[W]]
// CHECK:               vector.load %[[M]]
// CHECK:               vector.load %[[S]]
// CHECK-COUNT-3:       vector.fma
// CHECK:               math.sqrt
// CHECK:               vector.fma
// CHECK:               arith.divf
// CHECK:               vector.store %{{.*}}, %[[W]]{{.*}} : memref<?x?xf32>, vector<8xf32>
// CHECK:               vector.store %{{.*}}, %[[M]]
// CHECK:               vector.store %{{.*}}, %[[S]]
// CHECK:             scf.for
// CHECK:               vector.maskedload %[[G]]
// CHECK:               vector.maskedstore %[[S]]
// CHECK:             scf.for
// CHECK:               memref.load %[[W]]
// CHECK:               memref.store %{{.*}}, %[[D]]
func.func @step(%p: tensor<?xi64>, %c: tensor<?xi32>, %g: tensor<?xf32>, %r: tensor<?xf64>)
    -> (tensor<?x?xf32>, tensor<?xf32>, tensor<?xf32>, tensor<?x?xf32>) {
  %d, %m, %s, %w = "kernel.step_kept"(%p, %c, %g, %r)
    : (tensor<?xi64>, tensor<?xi32>, tensor<?xf32>, tensor<?xf64>) -> (tensor<?x?xf32>, tensor<?xf32>, tensor<?xf32>, tensor<?x?xf32>)
  return %d, %m, %s, %w : tensor<?x?xf32>, tensor<?xf32>, tensor<?xf32>, tensor<?x?xf32>
}
