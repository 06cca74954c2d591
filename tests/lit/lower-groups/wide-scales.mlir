// Scales of float32 are two words an entry, of which nothing is masked.
// RUN: gossamer-opt %s -p 'expose-storage,lower-groups,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func private @region_rows2(
// CHECK-SAME:    %{{[a-z0-9]*}}: memref<?x70xf32>, %{{[a-z0-9]*}}: memref<?xi32>, %{{[a-z0-9]*}}: memref<?xi8>, %{{[a-z0-9]*}}: memref<?xi8>, %[[SCALES:[a-z0-9]*]]: memref<?xi32>, %[[VALUES:[a-z0-9]*]]: memref<?xi8>,

// Sixteen scales of eight rows are a line.
// CHECK-COUNT-2: memref.prefetch %[[VALUES]]
// CHECK-COUNT-1: memref.prefetch %[[SCALES]]
// CHECK:         %[[AT:.*]] = arith.muli %[[ENTRY:.*]], %c2
// CHECK-NEXT:    %[[FIRST:.*]] = memref.load %[[SCALES]][%[[AT]]]
// CHECK-NEXT:    %[[ALL:.*]] = vector.broadcast %[[FIRST]] : i32 to vector<16xi32>
// CHECK-NEXT:    %[[NEXT:.*]] = arith.addi %[[AT]], %c1
// CHECK-NEXT:    %[[SECOND:.*]] = memref.load %[[SCALES]][%[[NEXT]]]
// CHECK-NEXT:    %[[OTHERS:.*]] = vector.broadcast %[[SECOND]] : i32 to vector<16xi32>
// CHECK-NEXT:    %[[SCALE:.*]] = arith.bitcast %[[ALL]] : vector<16xi32> to vector<16xf32>
// CHECK-NEXT:    arith.bitcast %[[OTHERS]] : vector<16xi32> to vector<16xf32>
// CHECK:         arith.mulf %{{.*}}, %[[SCALE]]
// CHECK-COUNT-2: vector.fma
func.func @region(%x: tensor<?x70xf32>, %w: tensor<40x70xf32, "groups(reduction=1, bits=4, places=8, scale=32)">) -> tensor<?x40xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "groups", tile = [2]} : (tensor<?x70xf32>, tensor<40x70xf32, "groups(reduction=1, bits=4, places=8, scale=32)">) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}
