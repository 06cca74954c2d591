// The packing has the columns of the matrix as rows: how far each row of a panel was read is kept in memory.
// RUN: gossamer-opt %s -p 'expose-storage,lower-take-in-order' | filecheck %s

// CHECK-LABEL: func.func @taken(
// CHECK-SAME:    %[[V:[a-z0-9]*]]: memref<?xf64>, %[[S:[a-z0-9]*]]: memref<?xi64>, %[[P:[a-z0-9]*]]: memref<?xi32>, %[[C:[a-z0-9]*]]: memref<?xi16>, %[[OUT:[a-z0-9]*]]: memref<?xf64>, %[[ENDS:[a-z0-9]*]]: memref<?xi64>
// CHECK:         scf.parallel
// CHECK:           scf.for
// CHECK:             scf.for
// CHECK:               memref.load %[[S]]
// CHECK:               memref.store %{{.*}}, %[[ENDS]]
// CHECK:             scf.for
// CHECK:               scf.for {{.*}} iter_args
// CHECK:                 memref.load %[[C]]
// CHECK:                 memref.load %[[ENDS]]
// CHECK:                 memref.load %[[V]]
// CHECK:                 memref.store %{{.*}}, %[[OUT]]
// CHECK:                 memref.store %{{.*}}, %[[ENDS]]
func.func @taken(%v: tensor<?xf64>, %s: tensor<?xi64>, %p: tensor<?xi32>, %c: tensor<?xi16>) -> (tensor<?xf64>, tensor<?xi64>) {
  %y, %e = "kernel.take_in_order"(%v, %s, %p, %c) {panel = 352 : i64, scale = 8 : i64}
    : (tensor<?xf64>, tensor<?xi64>, tensor<?xi32>, tensor<?xi16>) -> (tensor<?xf64>, tensor<?xi64>)
  return %y, %e : tensor<?xf64>, tensor<?xi64>
}
