// The lines of a row to come are fetched to be written, then the entries of a row are.
// RUN: gossamer-opt %s -p 'expose-storage,lower-put' | filecheck %s

// CHECK-LABEL: func.func @put(
// CHECK-SAME:    %[[P:[a-z0-9]*]]: memref<?xi64>, %[[C:[a-z0-9]*]]: memref<?xi32>, %[[V:[a-z0-9]*]]: memref<?xf64>, %[[OUT:[a-z0-9]*]]: memref<?x?xf64>
// CHECK:         scf.parallel
// CHECK:           scf.for
// CHECK:             scf.for
// CHECK:               memref.prefetch %[[OUT]]{{.*}}, write
// CHECK-COUNT-2:     memref.load %[[P]]
// CHECK:             scf.for
// CHECK:               memref.load %[[V]]
// CHECK:               memref.load %[[C]]
// CHECK:               memref.store %{{.*}}, %[[OUT]]
func.func @put(%p: tensor<?xi64>, %c: tensor<?xi32>, %v: tensor<?xf64>) -> tensor<?x?xf64> {
  %d = "kernel.put"(%p, %c, %v) : (tensor<?xi64>, tensor<?xi32>, tensor<?xf64>) -> tensor<?x?xf64>
  return %d : tensor<?x?xf64>
}
