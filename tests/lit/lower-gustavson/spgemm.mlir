// Room for each row, counted first if that is much; parts of equal work; a list of columns, in order by a set of them; a list of results.
// RUN: gossamer-opt %s -p 'expose-storage{arrays=true},lower-gustavson' | filecheck %s

// CHECK-LABEL: func.func @spgemm(
// CHECK-SAME:    memref<?xindex>, %{{[a-z0-9]*}}: memref<?xi8>, %{{[a-z0-9]*}}: index) {
// CHECK-COUNT-2: llvm.call
// CHECK:         scf.if
// CHECK:           scf.parallel
// CHECK:           llvm.call
// CHECK:           scf.if
// CHECK:             scf.if
// CHECK:               scf.parallel
// CHECK:                 math.cttz
// CHECK:                 math.ctpop
// CHECK-COUNT-3:     llvm.call
// CHECK:             scf.if
// CHECK:               memref.view {{.*}} to memref<?xi32>
// CHECK:               memref.view {{.*}} to memref<?xi16>
// CHECK:               memref.view {{.*}} to memref<?xf32>
// CHECK:               scf.parallel
// CHECK:                 math.fma
// CHECK:                 arith.ori
// CHECK:                 arith.ori
// CHECK-COUNT-5:         math.cttz
// CHECK:               memref.extract_aligned_pointer_as_index
// CHECK:         return
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#NARROW = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 16}>
func.func @spgemm(%a: tensor<?x?xf32, #CSR>, %b: tensor<?x?xf32, #CSR>) -> tensor<?x?xf32, #NARROW> {
  %c = "kernel.multiply_rows"(%a, %b) : (tensor<?x?xf32, #CSR>, tensor<?x?xf32, #CSR>) -> tensor<?x?xf32, #NARROW>
  return %c : tensor<?x?xf32, #NARROW>
}
