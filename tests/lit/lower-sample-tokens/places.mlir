// Coordinates are places in y, tiles have any width: pieces of four vectors of a row of x are held, the last piece goes by vectors.
// RUN: gossamer-opt %s -p 'expose-storage,lower-sample-tokens{bits=256}' | filecheck %s

// CHECK-LABEL: func.func @sampled(
// CHECK-SAME:    %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[AT:[a-z0-9]*]]: memref<?xi32>, %[[X:[a-z0-9]*]]: memref<?x?x?xf32>, %[[Y:[a-z0-9]*]]: memref<?x?xf32>, %[[OUT:[a-z0-9]*]]: memref<?xf32>
// CHECK:         scf.parallel
// CHECK:           scf.if
// CHECK-COUNT-4:     vector.load %[[X]]
// CHECK:             scf.for
// CHECK-COUNT-8:       memref.load %[[AT]]
// CHECK-COUNT-32:      vector.fma
// CHECK:               vector.store %{{.*}}, %[[OUT]][%{{.*}}] : memref<?xf32>, vector<8xf32>
// CHECK:           } else {
// CHECK:             scf.for
// CHECK:               scf.for {{.*}} iter_args
// CHECK:                 vector.load %[[X]]
// CHECK-COUNT-8:         vector.fma
// CHECK:               vector.maskedload %[[X]]
// CHECK:               vector.maskedload %[[Y]]
func.func @sampled(%p: tensor<?xi32>, %c: tensor<?xi32>, %x: tensor<?x?x?xf32>, %y: tensor<?x?xf32>) -> tensor<?xf32> {
  %v = "kernel.sample_places"(%p, %c, %x, %y)
    : (tensor<?xi32>, tensor<?xi32>, tensor<?x?x?xf32>, tensor<?x?xf32>) -> tensor<?xf32>
  return %v : tensor<?xf32>
}
