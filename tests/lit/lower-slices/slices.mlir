// Values are hashed, rows are lanes: columns that follow each other are loaded, others gathered two coordinates at a time.
// RUN: gossamer-opt %s -p 'expose-storage{arrays=true},lower-slices' | filecheck %s

// CHECK-LABEL: func.func @spmv(
// CHECK:         scf.parallel
// CHECK:           vector.load {{.*}} : memref<?xi32>, vector<16xi32>
// CHECK-COUNT-3:     arith.muli {{.*}} : i64
// CHECK:             vector.broadcast {{.*}} : i64 to vector<8xi64>
// CHECK-COUNT-2:     arith.muli {{.*}} : vector<8xi64>
// CHECK:           vector.maskedload
// CHECK:           vector.reduction <add>
// CHECK-COUNT-2:   scf.while
// CHECK:           scf.for
// CHECK:             scf.for {{.*}} iter_args(%{{.*}}) -> (vector<4xf32>)
// CHECK:               arith.cmpi sgt, {{.*}} : vector<4xi32>
// CHECK:               scf.if
// CHECK-COUNT-4:         memref.load {{.*}} : memref<?xf32>
// CHECK:                 vector.from_elements
// CHECK:               math.fma {{.*}} : vector<4xf32>
// CHECK:               arith.select {{.*}} : vector<4xi1>, vector<4xf32>
// CHECK:             scf.if
// CHECK:               vector.store
// CHECK-COUNT-4:       memref.store
func.func @spmv(%a: tensor<?x?xf32, "slices(reduction=1, lanes=4)">, %x: tensor<?xf32>) -> tensor<?xf32> {
  %y = "kernel.gather_slices"(%a, %x) : (tensor<?x?xf32, "slices(reduction=1, lanes=4)">, tensor<?xf32>) -> tensor<?xf32>
  return %y : tensor<?xf32>
}
