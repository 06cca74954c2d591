// The nonzeros of a row that are no entries are counted: those of its vectors, less those of its entries.
// RUN: gossamer-opt %s -p 'expose-storage,lower-collect{bits=256}' | filecheck %s

// CHECK-LABEL: func.func @counted(
// CHECK-SAME:    %[[P:[a-z0-9]*]]: memref<?xi64>, %[[C:[a-z0-9]*]]: memref<?xi32>, %[[D:[a-z0-9]*]]: memref<?x?xf32>, %[[OUT:[a-z0-9]*]]: memref<?xf32>, %[[OTHERS:[a-z0-9]*]]: memref<?xi64>
// CHECK:         scf.parallel
// CHECK:           %[[SUM:.*]] = scf.for
// CHECK:             %[[INSIDE:.*]] = scf.for
// CHECK:               memref.store %{{.*}}, %[[OUT]]
// CHECK:               arith.cmpf une
// CHECK:             scf.for
// CHECK:               vector.maskedload %[[D]]{{.*}} into vector<8xf32>
// CHECK:               arith.cmpf une
// CHECK:             vector.reduction <add>
// CHECK:             arith.subi %{{.*}}, %[[INSIDE]]
// CHECK:           memref.store %[[SUM]], %[[OTHERS]]
func.func @counted(%p: tensor<?xi64>, %c: tensor<?xi32>, %d: tensor<?x?xf32>) -> (tensor<?xf32>, tensor<?xi64>) {
  %v, %o = "kernel.collect_counted"(%p, %c, %d) : (tensor<?xi64>, tensor<?xi32>, tensor<?x?xf32>) -> (tensor<?xf32>, tensor<?xi64>)
  return %v, %o : tensor<?xf32>, tensor<?xi64>
}
