// A few tokens: the nonzeros of a row are expanded to where its columns are.
// RUN: gossamer-opt %s -p 'expose-storage,lower-bitmap,canonicalize,cse' | filecheck %s

// Four rows share the loads of x; each has a place among the values, and moves on by the bits of its mask.
// CHECK-LABEL: func.func private @region_rows2(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x30xf32>, %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[MASKS:[a-z0-9]*]]: memref<?xi16>, %[[VAL:[a-z0-9]*]]: memref<?xf32>, %[[BIAS:[a-z0-9]*]]: memref<7xf32>, %[[OUT:[a-z0-9]*]]: memref<?x7xf32>,
// CHECK:         %[[COPY:.*]] = memref.view %{{.*}} : memref<?xi8> to memref<2x32xf32>
// CHECK-COUNT-4: memref.load %[[POS]]
// CHECK:         scf.for %{{.*}} = %c0 to %c2 step %c1 iter_args(%[[P0:[a-z0-9]*]] = %{{.*}}) -> (index, index, index, index,
// CHECK-COUNT-2:   vector.load %[[COPY]]
// CHECK:           %[[BITS:.*]] = memref.load %[[MASKS]]
// CHECK:           %[[ONE:.*]] = vector.broadcast %[[BITS]] : i16 to vector<1xi16>
// CHECK:           %[[MASK:.*]] = vector.bitcast %[[ONE]] : vector<1xi16> to vector<16xi1>
// CHECK:           %[[COUNT:.*]] = math.ctpop
// CHECK:           %[[STEP:.*]] = arith.index_castui %[[COUNT]]
// CHECK:           %[[W:.*]] = vector.expandload %[[VAL]][%[[P0]]], %[[MASK]]
// CHECK:           %[[SUM:.*]] = vector.fma %[[W]]
// CHECK:           arith.select %[[MASK]], %[[SUM]]
// CHECK:           arith.addi %[[P0]], %[[STEP]]
// CHECK-COUNT-3:   vector.expandload
// CHECK:           scf.yield
// CHECK-COUNT-8: vector.reduction <add>
// CHECK:         vector.maskedload %[[BIAS]]
// CHECK:         vector.maskedstore %[[OUT]]
// CHECK-LABEL: func.func private @region_rows1(
// CHECK-LABEL: func.func @region(
func.func @region(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, "bitmap(reduction=1, lanes=16)">, %bias: tensor<7xf32>) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<7xf32>) -> f32
    %0 = arith.addf %sum, %b : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "bitmap", tile = [2]} : (tensor<?x30xf32>, tensor<7x30xf32, "bitmap(reduction=1, lanes=16)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}
