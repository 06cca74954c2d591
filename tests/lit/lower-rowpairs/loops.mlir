// Two rows at a time: the inner loops of a pair of rows in a panel of columns.
// RUN: gossamer-opt %s -p 'expose-storage,lower-rowpairs,canonicalize,cse' --split-input-file | filecheck %s

// x is packed panel by panel. With each pair, a part of the next panel's x is fetched, or of the next tile's after the last. The rows of a pair are looked up. Four nonzeros of the one come before four of the other, and take
// turns at the two sets of sums of their row; then comes one of each, as often as some are left. While a band is multiplied, the results of the one before are stored, of some tokens after each part of it.
// CHECK-LABEL: func.func private @region_tile4(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x30xf32>, %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi16>, %[[ORDER:[a-z0-9]*]]: memref<?xi32>, %[[VAL:[a-z0-9]*]]: memref<?xf32>, %[[OUT:[a-z0-9]*]]: memref<?x7xf32>,
// CHECK:         scf.for %[[PANEL:.*]] = %c0 to %c2 step %c1 {
// CHECK:           %[[START:.*]] = arith.muli %[[PANEL]], %c16
// CHECK:             arith.addi %[[START]]
// CHECK:             vector.maskedload %[[X]]
// CHECK:           scf.for %[[BAND:.*]] = %[[FIRST:.*]] to %{{.*}} step %c1 {
// CHECK:             scf.for %[[PART:.*]] = %c0 to %c8 step %c1 {
// CHECK:               scf.for %[[PAIR:.*]] = %{{.*}} to %{{.*}} step %c1 {
// CHECK:                 arith.muli %[[PANEL]], %c4
// CHECK:                 memref.load %[[ORDER]]
// CHECK:                 memref.load %[[ORDER]]
// CHECK:                 %[[LATER:.*]] = arith.addi %[[PANEL]], %c1
// CHECK:                 %[[COLUMNS:.*]] = arith.muli %[[LATER]], %c16
// CHECK:                 %[[COLUMN:.*]] = arith.select %{{.*}}, %c0, %[[COLUMNS]]
// CHECK:                 memref.prefetch %[[X]][%{{.*}}, %[[COLUMN]]], read, locality<2>, data
// CHECK:                 memref.load %[[POS]]
// CHECK:                 memref.load %[[POS]]
// CHECK:                 %{{.*}}:8 = scf.for %[[P:.*]] = %{{.*}} to %{{.*}} step %c8 iter_args(
// CHECK:                   vector.load %[[VAL]][%[[P]]] : memref<?xf32>, vector<4xf32>
// CHECK-COUNT-8:           vector.fma
// CHECK:                   %[[Q:.*]] = arith.addi %[[P]], %c4
// CHECK:                   vector.load %[[VAL]][%[[Q]]] : memref<?xf32>, vector<4xf32>
// CHECK-COUNT-8:           vector.fma
// CHECK:                   scf.yield
// CHECK:                 scf.for %[[ONE:.*]] = %{{.*}} to %{{.*}} step %c2 iter_args(
// CHECK:                   memref.load %[[CRD]][%[[ONE]]]
// CHECK:                   memref.load %[[VAL]][%[[ONE]]]
// CHECK-COUNT-2:           vector.fma
// CHECK:                   %[[OTHER:.*]] = arith.addi %[[ONE]], %c1
// CHECK:                   memref.load %[[VAL]][%[[OTHER]]]
// CHECK-COUNT-2:           vector.fma
// CHECK:               %[[BEFORE:.*]] = arith.cmpi ugt, %[[BAND]], %[[FIRST]]
// CHECK:               arith.andi %{{.*}}, %[[BEFORE]]
// CHECK:               scf.if
// CHECK:                 arith.muli %[[PART]], %c2
// CHECK:                 vector.maskedstore %[[OUT]]
// CHECK-LABEL: func.func @region(
func.func @region(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [4, 4]} : (tensor<?x30xf32>, tensor<7x30xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}
