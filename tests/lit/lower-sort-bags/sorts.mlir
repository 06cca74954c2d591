// A word for each entry, then a pass for each eleven bits of the rows, then the rows that differ.
// RUN: gossamer-opt %s -p 'expose-storage,lower-sort-bags' | filecheck %s

// CHECK:       kernel.workspace = 16384 : index
// CHECK-LABEL: func.func @sorts(
// CHECK:         scf.parallel
// CHECK:           arith.shli
// CHECK:           arith.ori
// CHECK:           math.ctlz
// CHECK:           arith.ceildivui
// CHECK:           scf.for
// CHECK:             arith.shrui
// CHECK:             arith.andi
// CHECK:           arith.cmpi ne
// CHECK:           scf.if
func.func @sorts(%lines: tensor<?x?xi64>) -> (tensor<?xi64>, tensor<?xi32>, tensor<?xi32>, tensor<?xf32>, tensor<?xi64>,
    tensor<?xi64>, tensor<?xi64>, tensor<?xi32>, tensor<?xf32>) {
  %numbers, %starts, %bags, %scales, %counts, %wrong, %words, %own_bags, %own_scales = "kernel.sort_bags"(%lines)
    {integers = "i64", weights = "none", scaled = 0 : i64}
    : (tensor<?x?xi64>) -> (tensor<?xi64>, tensor<?xi32>, tensor<?xi32>, tensor<?xf32>, tensor<?xi64>, tensor<?xi64>,
    tensor<?xi64>, tensor<?xi32>, tensor<?xf32>)
  return %numbers, %starts, %bags, %scales, %counts, %wrong, %words, %own_bags, %own_scales
    : tensor<?xi64>, tensor<?xi32>, tensor<?xi32>, tensor<?xf32>, tensor<?xi64>, tensor<?xi64>, tensor<?xi64>, tensor<?xi32>,
      tensor<?xf32>
}
