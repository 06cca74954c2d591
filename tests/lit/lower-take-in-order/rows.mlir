// The packing has the rows of the matrix: each is read from its begin on, panel after panel, four entries at a time.
// RUN: gossamer-opt %s -p 'expose-storage,lower-take-in-order' | filecheck %s

// CHECK-LABEL: func.func @taken(
// CHECK-SAME:    %[[V:[a-z0-9]*]]: memref<?xf32>, %[[S:[a-z0-9]*]]: memref<?xi32>, %[[P:[a-z0-9]*]]: memref<?xi32>, %[[C:[a-z0-9]*]]: memref<?xi16>, %[[OUT:[a-z0-9]*]]: memref<?xf32>, %[[ENDS:[a-z0-9]*]]: memref<?xi32>
// CHECK:         scf.parallel
// CHECK:           scf.for
// CHECK:             memref.load %[[S]]
// CHECK:             scf.for {{.*}} iter_args
// CHECK-COUNT-2:       memref.load %[[P]]
// CHECK:               scf.for {{.*}} iter_args
// CHECK-NOT:             memref.load %[[ENDS]]
// CHECK:                 memref.load %[[C]]
// CHECK:                 memref.load %[[V]]
// CHECK:                 memref.store %{{.*}}, %[[OUT]]
// CHECK:             memref.store %{{.*}}, %[[ENDS]]
func.func @taken(%v: tensor<?xf32>, %s: tensor<?xi32>, %p: tensor<?xi32>, %c: tensor<?xi16>) -> (tensor<?xf32>, tensor<?xi32>) {
  %y, %e = "kernel.take_in_order"(%v, %s, %p, %c) {panel = 0 : i64, scale = 8 : i64}
    : (tensor<?xf32>, tensor<?xi32>, tensor<?xi32>, tensor<?xi16>) -> (tensor<?xf32>, tensor<?xi32>)
  return %y, %e : tensor<?xf32>, tensor<?xi32>
}
