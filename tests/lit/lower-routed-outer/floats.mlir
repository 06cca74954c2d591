// Rows are gathered into panels; 24 sums of 6 rows and 4 vectors of columns; an expert without a slot gets zeros.
// RUN: gossamer-opt %s -p 'expose-storage,lower-routed-outer' | filecheck %s

// CHECK-LABEL: func.func private @region_left(
// CHECK-LABEL: func.func private @region_right(
// CHECK:         arith.divui
// CHECK-LABEL: func.func private @region_tile6(
// CHECK-COUNT-24: vector.maskedload
// CHECK:         scf.for
// CHECK-COUNT-24:  vector.fma
// CHECK-NEXT:      scf.yield
// CHECK-LABEL: func.func @region(
// CHECK:         scf.parallel
// CHECK:           func.call @region_right
// CHECK:           func.call @region_left
// CHECK:           func.call @region_tile6
func.func @region(%left: tensor<?x?xf32>, %right: tensor<?x?xf32>, %positions: tensor<?xi64>, %order: tensor<?xi64>) -> tensor<?x?x?xf32> {
  %y = "kernel.routed_outer"(%left, %right, %positions, %order) {left_top = 0 : i64, right_top = 8 : i64, dots = 0 : i64} : (tensor<?x?xf32>, tensor<?x?xf32>, tensor<?xi64>, tensor<?xi64>) -> tensor<?x?x?xf32>
  return %y : tensor<?x?x?xf32>
}
