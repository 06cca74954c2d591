// Keys are counted one place behind their own, so that what is left in the end is where those of each key begin.
// RUN: gossamer-opt %s -p 'expose-storage,lower-sort-keys' | filecheck %s

// CHECK-LABEL: func.func @sort(
// CHECK-SAME:    %[[KEYS:.*]]: memref<?xi32>, %[[POSITIONS:.*]]: memref<?xi32>, %[[ORDER:.*]]: memref<?xi64>
// CHECK:         scf.for
// CHECK:           memref.store %{{.*}}, %[[POSITIONS]]
// CHECK:         scf.for
// CHECK:           memref.load %[[KEYS]]
// CHECK:           memref.store %{{.*}}, %[[POSITIONS]]
// CHECK:         scf.for {{.*}} iter_args
// CHECK:           memref.store %{{.*}}, %[[POSITIONS]]
// CHECK:         scf.for
// CHECK:           memref.load %[[KEYS]]
// CHECK:           memref.store %{{.*}}, %[[POSITIONS]]
// CHECK:           memref.store %{{.*}}, %[[ORDER]]
// CHECK:         return
func.func @sort(%keys: tensor<?xi32>) -> (tensor<?xi32>, tensor<?xi64>) {
  %positions, %order = "kernel.sort_keys"(%keys) : (tensor<?xi32>) -> (tensor<?xi32>, tensor<?xi64>)
  return %positions, %order : tensor<?xi32>, tensor<?xi64>
}
