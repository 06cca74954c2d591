"""Operations over the edges of a graph: what gather and scatter have in common with operations on SparseTensors."""
