// Values are hashed, rows are lanes: columns that follow each other are loaded, others gathered by four coordinates at a time.
// The steps that all rows of a slice have need no mask.
// RUN: gossamer-opt %s -p 'expose-storage{arrays=true},lower-slices' --split-input-file | filecheck %s

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
// CHECK:             memref.reinterpret_cast
// CHECK:             scf.for {{.*}} iter_args(%{{.*}}) -> (vector<8xf32>)
// CHECK-NOT:           arith.select
// CHECK:               scf.if
// CHECK-COUNT-2:         vector.load {{.*}} : memref<?xi16>, vector<4xi16>
// CHECK-COUNT-8:         memref.load {{.*}} : memref<?xf32, strided<[1], offset: ?>>
// CHECK:                 vector.from_elements
// CHECK:               math.fma {{.*}} : vector<8xf32>
// CHECK:             scf.for {{.*}} iter_args(%{{.*}}) -> (vector<8xf32>)
// CHECK:               arith.cmpi sgt, {{.*}} : vector<8xi32>
// CHECK:               math.fma {{.*}} : vector<8xf32>
// CHECK:               arith.select {{.*}} : vector<8xi1>, vector<8xf32>
// CHECK:             scf.if
// CHECK:               vector.store
// CHECK-COUNT-8:       memref.store
func.func @spmv(%a: tensor<?x?xf32, "slices(reduction=1, lanes=8, width=16)">, %x: tensor<?xf32>) -> tensor<?xf32> {
  %y = "kernel.gather_slices"(%a, %x) {gathers = 0 : i64} : (tensor<?x?xf32, "slices(reduction=1, lanes=8, width=16)">, tensor<?xf32>) -> tensor<?xf32>
  return %y : tensor<?xf32>
}

// -----

// Vectors of 512 bits pick columns that are near each other out of two loads; the target gathers the others by one instruction.
// CHECK-LABEL: func.func @picked(
// CHECK:         scf.for {{.*}} iter_args(%{{.*}}) -> (vector<16xf32>)
// CHECK:           scf.if
// CHECK:             vector.load {{.*}} : memref<?xf32>, vector<16xf32>
// CHECK:             %[[NEAR:.*]] = arith.cmpi slt
// CHECK:             scf.if %[[NEAR]]
// CHECK:               %[[LOW:.*]] = vector.load {{.*}} : memref<?xf32>, vector<16xf32>
// CHECK:               %[[HIGH:.*]] = vector.load {{.*}} : memref<?xf32>, vector<16xf32>
// CHECK:               llvm.call_intrinsic "llvm.x86.avx512.vpermi2var.ps.512"(%[[LOW]], %{{.*}}, %[[HIGH]])
// CHECK:               vector.gather
func.func @picked(%a: tensor<?x?xf32, "slices(reduction=1, lanes=16, width=16)">, %x: tensor<?xf32>) -> tensor<?xf32> {
  %y = "kernel.gather_slices"(%a, %x) {gathers = 1 : i64} : (tensor<?x?xf32, "slices(reduction=1, lanes=16, width=16)">, tensor<?xf32>) -> tensor<?xf32>
  return %y : tensor<?xf32>
}
