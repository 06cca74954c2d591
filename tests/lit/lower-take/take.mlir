// Whole vectors, then a masked one; what has no place is 0.
// RUN: gossamer-opt %s -p 'expose-storage,lower-take{bits=256}' | filecheck %s

// CHECK-LABEL: func.func @take(
// CHECK-SAME:    %[[VALUES:.*]]: memref<?xf32>, %[[PLACES:.*]]: memref<?xi32>, %[[OUT:.*]]: memref<?xf32>
// CHECK:         scf.parallel
// CHECK:           scf.for
// CHECK:             vector.load %[[PLACES]]
// CHECK:             vector.gather %[[VALUES]]
// CHECK:             vector.store %{{.*}}, %[[OUT]]
// CHECK:           scf.for
// CHECK:             vector.maskedload %[[PLACES]]
// CHECK:             vector.gather %[[VALUES]]
// CHECK:             vector.maskedstore %[[OUT]]
func.func @take(%values: tensor<?xf32>, %places: tensor<?xi32>) -> tensor<?xf32> {
  %taken = "kernel.take"(%values, %places) : (tensor<?xf32>, tensor<?xi32>) -> tensor<?xf32>
  return %taken : tensor<?xf32>
}
