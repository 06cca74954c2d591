// Some slots on 256 bits: 8 at a time with packed columns, 8 sums. Rows are read in place, and later ones are fetched. Few
// slots and many have functions, too. The tiles of many slots fetch some lines of the next panel before they begin.
// RUN: gossamer-opt %s -p 'expose-storage,lower-routed-product{bits=256}' | filecheck %s

// CHECK-LABEL: func.func private @region_few3(
// CHECK-LABEL: func.func private @region_some8(
// CHECK-COUNT-8:  vector.store
// CHECK:          scf.for
// CHECK:            memref.prefetch
// CHECK-COUNT-16:   vector.fma
// CHECK-LABEL: func.func private @region_many6(
// CHECK:          scf.if
// CHECK-COUNT-16:   memref.prefetch
// CHECK:          scf.for
// CHECK-COUNT-12:   vector.fma
// CHECK-LABEL: func.func @region(
// CHECK:             func.call @region_few3
// CHECK:             scf.for
// CHECK:             scf.for
// CHECK:               scf.for
// CHECK:                   func.call @region_some8
// CHECK:             func.call @region_pack
func.func @region(%x: tensor<?x?xf32>, %weight: tensor<?x?x?xf32>, %scales: tensor<?x?x?xf32>, %bias: tensor<?x?xf32>, %positions: tensor<?xi64>, %order: tensor<?xi64>) -> tensor<?x?xf32> {
  %y = "kernel.routed_product"(%x, %weight, %scales, %bias, %positions, %order) {top = 8 : i64, dots = 0 : i64, four = 0 : i64, group = 0 : i64, turned = 0 : i64} : (tensor<?x?xf32>, tensor<?x?x?xf32>, tensor<?x?x?xf32>, tensor<?x?xf32>, tensor<?xi64>, tensor<?xi64>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}
