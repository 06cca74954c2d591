// Entries go into a row that is copied and cleared again: past the caches where rows are whole vectors of a large matrix.
// RUN: gossamer-opt %s -p 'expose-storage,lower-spread{bits=256}' | filecheck %s

// CHECK-LABEL: func.func @spread(
// CHECK-SAME:    %[[P:[a-z0-9]*]]: memref<?xi64>, %[[C:[a-z0-9]*]]: memref<?xi32>, %[[V:[a-z0-9]*]]: memref<?xf32>, %[[OUT:[a-z0-9]*]]: memref<?x?xf32>, %[[ROW:[a-z0-9]*]]: memref<?x?xf32>
// CHECK:         scf.parallel
// CHECK:           scf.for
// CHECK:             memref.store %{{.*}}, %[[ROW]]
// CHECK:           scf.if
// CHECK:             scf.for
// CHECK-COUNT-2:       memref.load %[[P]]
// CHECK:               scf.for
// CHECK:                 memref.load %[[V]]
// CHECK:                 memref.store %{{.*}}, %[[ROW]]
// CHECK:               scf.for
// CHECK:                 vector.load %[[ROW]]
// CHECK:                 vector.store %{{.*}}, %[[OUT]]{{.*}} {alignment = 32 : i64, nontemporal = true}
// CHECK:               scf.for
// CHECK:                 memref.store %{{.*}}, %[[ROW]]
// CHECK:           else
// CHECK:                 vector.maskedload %[[ROW]]
// CHECK:                 vector.maskedstore %[[OUT]]
func.func @spread(%p: tensor<?xi64>, %c: tensor<?xi32>, %v: tensor<?xf32>) -> (tensor<?x?xf32>, tensor<?x?xf32>) {
  %d, %w = "kernel.spread"(%p, %c, %v) : (tensor<?xi64>, tensor<?xi32>, tensor<?xf32>) -> (tensor<?x?xf32>, tensor<?x?xf32>)
  return %d, %w : tensor<?x?xf32>, tensor<?x?xf32>
}
