// Two rows at a time: the inner loops of a pair of rows in a panel of columns.
// RUN: gossamer-opt %s -p 'expose-storage,lower-rowpairs,canonicalize,cse' --split-input-file | filecheck %s

// A panel of a pair has two parts. In the columns that both rows have, the loads of x serve both; the rest takes a column of each
// row. The sums stay in registers all the while.
// CHECK-LABEL: func.func private @region_tile4(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x30xf32>, %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi16>, %[[VAL:[a-z0-9]*]]: memref<?xf32>, %[[OUT:[a-z0-9]*]]: memref<?x7xf32>,
// CHECK:         %[[PAIRS:.*]] = arith.muli %[[PANEL:.*]], %c4
// CHECK-NEXT:    %[[PAIR:.*]] = arith.addi %[[PAIRS]], %{{.*}}
// CHECK-NEXT:    %[[AT:.*]] = arith.muli %[[PAIR]], %c2
// CHECK-NEXT:    memref.load %[[POS]][%[[AT]]]
// CHECK:         memref.load %[[POS]]
// CHECK:         memref.load %[[POS]]
// CHECK:         %[[COMMON:.*]]:4 = scf.for %[[P:.*]] = %{{.*}} to %[[MIDDLE:.*]] step %c1 iter_args(%[[A:.*]] = %{{.*}}, %[[B:.*]] = %{{.*}}, %[[C:.*]] = %{{.*}}, %[[D:.*]] = %{{.*}}) -> {{.*}} {
// CHECK-NEXT:      %[[P0:.*]] = arith.muli %[[P]], %c2
// CHECK-NEXT:      %[[I:.*]] = memref.load %[[CRD]][%[[P0]]]
// CHECK-NEXT:      %[[J:.*]] = arith.index_castui %[[I]]
// CHECK-NEXT:      %[[K:.*]] = arith.addi %{{.*}}, %[[J]]
// CHECK-NEXT:      %[[X0:.*]] = vector.load %[[PACKED:.*]][%[[K]], %c0]
// CHECK-NEXT:      %[[X1:.*]] = vector.load %[[PACKED]][%[[K]], %c2]
// CHECK-NEXT:      memref.load %[[VAL]][%[[P0]]]
// CHECK-NEXT:      %[[V:.*]] = vector.broadcast
// CHECK-NEXT:      vector.fma %[[V]], %[[X0]], %[[A]]
// CHECK-NEXT:      vector.fma %[[V]], %[[X1]], %[[B]]
// CHECK-NEXT:      %[[P1:.*]] = arith.addi %[[P0]], %c1
// CHECK-NEXT:      memref.load %[[VAL]][%[[P1]]]
// CHECK-NEXT:      %[[W:.*]] = vector.broadcast
// CHECK-NEXT:      vector.fma %[[W]], %[[X0]], %[[C]]
// CHECK-NEXT:      vector.fma %[[W]], %[[X1]], %[[D]]
// CHECK-NEXT:      scf.yield
// CHECK:         scf.for %{{.*}} = %[[MIDDLE]] to %{{.*}} step %c1 iter_args(%{{.*}} = %[[COMMON]]#0, %{{.*}} = %[[COMMON]]#1, %{{.*}} = %[[COMMON]]#2, %{{.*}} = %[[COMMON]]#3) -> {{.*}} {
// CHECK:           memref.load %[[CRD]]
// CHECK:           memref.load %[[CRD]]
// CHECK-COUNT-4:   vector.load %[[PACKED]]
// CHECK-COUNT-4:   vector.fma
// CHECK-NEXT:      scf.yield
// CHECK:         vector.maskedstore %[[OUT]]
// CHECK-LABEL: func.func @region(
func.func @region(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [4, 4]} : (tensor<?x30xf32>, tensor<7x30xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}
