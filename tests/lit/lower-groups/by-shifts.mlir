// Where no instruction looks up 16 floats, two groups of 4 bits are shifted apart, half of each at a time.
// RUN: gossamer-opt %s -p 'expose-storage,lower-groups,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func private @region_rows2(
// CHECK-NOT:     permvar
// CHECK:         %[[BYTES:.*]] = vector.load %{{.*}} : memref<?xi8>, vector<8xi8>
// CHECK:         %[[WIDE:.*]] = arith.extsi %[[BYTES]] : vector<8xi8> to vector<8xi32>
// CHECK:         %[[LEFT:.*]] = arith.shli %[[WIDE]], %[[S:.*]] : vector<8xi32>
// CHECK:         %[[LOW:.*]] = arith.shrsi %[[LEFT]], %[[S]] : vector<8xi32>
// CHECK:         %[[HIGH:.*]] = arith.shrsi %[[WIDE]], %{{.*}} : vector<8xi32>
// CHECK-DAG:     arith.sitofp %[[LOW]] : vector<8xi32> to vector<8xf32>
// CHECK-DAG:     arith.sitofp %[[HIGH]] : vector<8xi32> to vector<8xf32>
// CHECK:         vector.load %{{.*}} : memref<?xi8>, vector<8xi8>
func.func @region(%x: tensor<?x70xf32>, %w: tensor<40x70xf32, "groups(reduction=1, bits=4, places=8, scale=16)">) -> tensor<?x40xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "groups", tile = [2]} : (tensor<?x70xf32>, tensor<40x70xf32, "groups(reduction=1, bits=4, places=8, scale=16)">) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}
