// One walk for each shift, without a branch on the keys.
// RUN: gossamer-opt %s -p 'expose-storage,lower-match-keys' | filecheck %s

// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %[[KEYS:[a-z0-9]*]]: memref<?xi64>, %[[SHIFTS:[a-z0-9]*]]: memref<?xi64>, %[[INTO:[a-z0-9]*]]: memref<?x?xi32>, %[[OUT:[a-z0-9]*]]: memref<?x?xi32>, %[[COUNTS:[a-z0-9]*]]: memref<?xi32>
// CHECK:         scf.parallel
// CHECK:           memref.load %[[SHIFTS]]
// CHECK:           scf.while
// CHECK:             memref.store %{{.*}}, %[[INTO]]
// CHECK:             memref.store %{{.*}}, %[[OUT]]
// CHECK-COUNT-2:     memref.load %[[KEYS]]
// CHECK:             arith.cmpi sle
// CHECK:             arith.cmpi sge
// CHECK:             arith.cmpi eq
// CHECK-NOT:         scf.if
// CHECK:           memref.store %{{.*}}, %[[COUNTS]]
func.func @region(%keys: tensor<?xi64>, %shifts: tensor<?xi64>) -> (tensor<?x?xi32>, tensor<?x?xi32>, tensor<?xi32>) {
  %into, %out, %counts = "kernel.match_keys"(%keys, %shifts) : (tensor<?xi64>, tensor<?xi64>) -> (tensor<?x?xi32>, tensor<?x?xi32>, tensor<?xi32>)
  return %into, %out, %counts : tensor<?x?xi32>, tensor<?x?xi32>, tensor<?xi32>
}
