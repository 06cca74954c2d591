// A row of x is read once for all its entries; vectors of entries, then fours, the last ones masked.
// RUN: gossamer-opt %s -p 'expose-storage,lower-sample-tokens{bits=256}' | filecheck %s

// CHECK-LABEL: func.func @sampled(
// CHECK-SAME:    %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi32>, %[[X:[a-z0-9]*]]: memref<?x?x16xf32>, %[[Y:[a-z0-9]*]]: memref<?x?x16xf32>, %[[OUT:[a-z0-9]*]]: memref<?xf32>
// CHECK:         scf.parallel
// CHECK-COUNT-2:   scf.while
// CHECK:           scf.for
// CHECK:             scf.for
// CHECK-COUNT-2:       vector.load %[[X]]
// CHECK:               scf.for
// CHECK-COUNT-8:         memref.load %[[CRD]]
// CHECK-COUNT-16:        vector.fma
// CHECK:                 vector.store %{{.*}}, %[[OUT]][%{{.*}}] : memref<?xf32>, vector<8xf32>
// CHECK:               scf.for
// CHECK-COUNT-4:         memref.load %[[CRD]]
// CHECK-COUNT-8:         vector.fma
// CHECK:                 vector.maskedstore %[[OUT]]
func.func @sampled(%p: tensor<?xi32>, %c: tensor<?xi32>, %x: tensor<?x?x16xf32>, %y: tensor<?x?x16xf32>) -> tensor<?xf32> {
  %v = "kernel.sample_tokens"(%p, %c, %x, %y)
    : (tensor<?xi32>, tensor<?xi32>, tensor<?x?x16xf32>, tensor<?x?x16xf32>) -> tensor<?xf32>
  return %v : tensor<?xf32>
}
