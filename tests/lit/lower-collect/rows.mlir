// The lines of a row to come are fetched, then the entries of a row are read.
// RUN: gossamer-opt %s -p 'expose-storage,lower-collect' | filecheck %s

// CHECK-LABEL: func.func @collect(
// CHECK-SAME:    %[[P:[a-z0-9]*]]: memref<?xi64>, %[[C:[a-z0-9]*]]: memref<?xi32>, %[[D:[a-z0-9]*]]: memref<?x?xf64>, %[[OUT:[a-z0-9]*]]: memref<?xf64>
// CHECK:         scf.parallel
// CHECK:           scf.for
// CHECK:             scf.for
// CHECK:               memref.prefetch %[[D]]
// CHECK-COUNT-2:     memref.load %[[P]]
// CHECK:             scf.for
// CHECK:               memref.load %[[C]]
// CHECK:               memref.load %[[D]]
// CHECK:               memref.store %{{.*}}, %[[OUT]]
func.func @collect(%p: tensor<?xi64>, %c: tensor<?xi32>, %d: tensor<?x?xf64>) -> tensor<?xf64> {
  %v = "kernel.collect"(%p, %c, %d) : (tensor<?xi64>, tensor<?xi32>, tensor<?x?xf64>) -> tensor<?xf64>
  return %v : tensor<?xf64>
}
