// Two slots of bf16 are multiplied by one instruction; the last of an odd number gets zeros beside it.
// RUN: gossamer-opt %s -p 'expose-storage,lower-routed-outer' | filecheck %s

// CHECK-LABEL: func.func private @region_left(
// CHECK:         arith.cmpi ult
// CHECK:         arith.select
// CHECK:         vector.shuffle
// CHECK-LABEL: func.func private @region_tile6(
// CHECK-COUNT-24: x86.avx512.dot
func.func @region(%left: tensor<?x?xbf16>, %right: tensor<?x?xbf16>, %positions: tensor<?xi64>, %order: tensor<?xi64>) -> tensor<?x?x?xbf16> {
  %y = "kernel.routed_outer"(%left, %right, %positions, %order) {left_top = 1 : i64, right_top = 0 : i64, dots = 1 : i64} : (tensor<?x?xbf16>, tensor<?x?xbf16>, tensor<?xi64>, tensor<?xi64>) -> tensor<?x?x?xbf16>
  return %y : tensor<?x?x?xbf16>
}
