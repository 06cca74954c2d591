// Nothing is read or written past the end of a tensor.
// RUN: gossamer-opt %s -p 'expose-storage,lower-broadcast,canonicalize,cse' --split-input-file | filecheck %s

// A vector of tokens that would reach past the last one is moved back.
// CHECK-LABEL: func.func private @tails_tile4(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x30xf32>,
// CHECK:         %[[T:.*]] = memref.dim %{{.*}}, %c0
// CHECK:         scf.for %{{.*}} = %c0 to %c2 step %c1
// CHECK:           %[[START:.*]] = arith.subi %[[T]], %c2
// CHECK:           %[[TOKEN:.*]] = arith.minui %{{.*}}, %[[START]]
// CHECK:           %[[NEXT:.*]] = arith.addi %[[TOKEN]], %c1
// CHECK:           scf.for %[[K:.*]] = %c0 to %c30 step %c2
// CHECK:             vector.load %[[X]][%[[TOKEN]], %[[K]]]
// CHECK:             vector.load %[[X]][%[[NEXT]], %[[K]]]

// What is left of the rows is masked where y is stored, for the same tokens.
// CHECK:         scf.if
// CHECK:           %[[END:.*]] = arith.subi %[[T]], %c2
// CHECK:           %[[MOVED:.*]] = arith.minui %{{.*}}, %[[END]] : index
// CHECK:         %[[ROWS:.*]] = arith.subi %c7, %[[ROW:.*]] : index
// CHECK:         %[[FEATURES:.*]] = vector.create_mask %[[ROWS]]
// CHECK:         %[[EXISTS:.*]] = arith.cmpi ult, %[[MOVED]], %[[T]]
// CHECK:         %[[STORED:.*]] = arith.select %[[EXISTS]], %[[FEATURES]], %[[NONE:.*]] :
// CHECK:         %[[SAFE:.*]] = arith.minui %[[MOVED]], %{{.*}}
// CHECK:         vector.maskedstore %{{.*}}[%[[SAFE]], %[[ROW]]], %[[STORED]], %{{.*}} : memref<?x7xf32>

// There may be fewer tokens than a vector has: the last one is repeated.
// CHECK-LABEL: func.func private @tails_tile2(
// CHECK:         %[[LAST:.*]] = arith.subi %{{.*}}, %c1
// CHECK:         %[[REPEATED:.*]] = arith.minui %{{.*}}, %[[LAST]]
// CHECK:         vector.load %{{.*}}[%[[REPEATED]], %{{.*}}] : memref<?x30xf32>
func.func @tails(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, "padded(reduction=1, columns=16)">) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [4]} : (tensor<?x30xf32>, tensor<7x30xf32, "padded(reduction=1, columns=16)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}

// -----

// What is left of the columns is masked where x is packed.
// CHECK-LABEL: func.func private @columns_tile4(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x29xf32>,
// CHECK:         scf.for %[[K:.*]] = %c0 to %c30 step %c2
// CHECK:           %[[LEFT:.*]] = arith.subi %c29, %[[K]]
// CHECK:           %[[MASK:.*]] = vector.create_mask %[[LEFT]]
// CHECK:           vector.maskedload %[[X]][%{{.*}}, %[[K]]], %[[MASK]]

// Where all rows are whole vectors, nothing is masked: a token that two vectors have gets the same from both.
// CHECK-NOT:     vector.maskedstore
// CHECK:         vector.store %{{.*}} : memref<?x8xf32>
func.func @columns(%x: tensor<?x29xf32>, %w: tensor<8x29xf32, "padded(reduction=1, columns=16)">) -> tensor<?x8xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [4]} : (tensor<?x29xf32>, tensor<8x29xf32, "padded(reduction=1, columns=16)">) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}
