// Every dense result has an output of its own.
// RUN: gossamer-opt %s -p 'expose-storage' | filecheck %s

// CHECK:         func.func @region(%[[X:.*]]: memref<4xf32>, %[[Y:.*]]: memref<4xf32>, %[[Z:.*]]: memref<4xf32>, %{{.*}}: memref<?xi8>, %{{.*}}: index)
// CHECK:           bufferization.materialize_in_destination %{{.*}} in restrict writable %[[Y]]
// CHECK:           bufferization.materialize_in_destination %{{.*}} in restrict writable %[[Z]]
func.func @region(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  return %x, %x : tensor<4xf32>, tensor<4xf32>
}
